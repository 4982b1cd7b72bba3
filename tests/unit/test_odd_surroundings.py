"""What surrounds a command and is not as usual: output, current folder, interpreter, paths, other writers."""

from pathlib import Path

import pytest

from sapo.bus.kafka.diagnose import _check_limits
from sapo.core.config.home import Home
from sapo.core.errors import UserError
from sapo.store.history.query import dataset
from sapo.store.history.tables import Store


@pytest.mark.parametrize("name", [" a b", "a#b", "a%b", "a'b", 'a"b', "a+=&$~;:,@!(){}`<>b", "é日😀"])
def test_other_names_of_folders_are_taken_and_tables_can_lie_there(tmp_path: Path, name: str) -> None:
    store = Store(str(Home.at(tmp_path / name, "s").history))
    store.open("rollouts")
    assert dataset(store, "rollouts").count_rows() == 0


@pytest.mark.parametrize("codec", ["snappy", "a-codec-of-tomorrow"])
def test_a_topic_whose_codec_cannot_be_read_is_refused(codec: str) -> None:
    with pytest.raises(UserError) as refused:
        _check_limits({"compression.type": codec}, "t", 1000)
    assert refused.value.field == "bus.topic"
