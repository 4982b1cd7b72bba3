"""Commands about keys: `sapo keys show`, `backup`, `restore`, `invite`, `accept`."""

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sapo.cli.commands.options import (
    ConfigOption,
    HomeOption,
    JsonOption,
    PresetOption,
    SetOption,
    counted,
    find_home,
    print_json,
    warn,
)
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config
    from sapo.peers.keyring import KeyAndCard

DAY_S = 86_400
_KEY = re.compile("[0-9a-f]{64}")
OPEN = ('rules.entry="open"', "rules.members=[]")
"""Who may publish is no matter here: keys are made before anybody can be put on a list."""

NodesOption = Annotated[int | None, typer.Option("--nodes", metavar="N", help="How many nodes run here.")]
NodeOption = Annotated[
    str | None, typer.Option("--node", metavar="NAME", help="Whose key; not needed where there is one node.")
]


def show(
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: NodesOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the public key of every node here; those that have none get one.

    Before a swarm has begun, say what it is to be begun with: --preset, --config, --set, --nodes. The keys
    can then be put into rules.members, here and at the other sites.
    """
    from sapo.peers import keyring

    found, settings = _locate(preset, config, counted([*(sets or []), *OPEN], nodes), home)
    rows = []
    for name in found.here(settings):
        held = _held(found, settings, name)
        copy = keyring.data_folder() / f"{held.identity.key}.pem"
        rows.append(
            {
                "node": name,
                "key": held.identity.key,
                "file": str(found.key(name)),
                "kept": str(copy) if copy.exists() else None,
                "created": held.card.created,
                "invited_until": held.card.invitation.until if held.card.invitation else None,
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        say(f"{row['node']}: {row['key']}")


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that is written; mode 600.")],
    node: NodeOption = None,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase, and encrypt the keys with it.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Write the keys of a home, or of one node, into one file.

    A passphrase may also be in SAPO_KEYS_PASSPHRASE. Without one, whoever reads the file is these nodes.
    """
    from sapo.peers import key_backup as backups

    found = find_home(home)
    settings = found.load_config()
    names = [_pick(settings, found, node)] if node else found.here(settings)
    held = [_held(found, settings, name) for name in names if found.key(name).exists()]
    if not held:
        raise UserError("--home", str(found.root), "holds no key to back up", "name another home or node")
    secret = os.environ.get(backups.PASSPHRASE) or (_ask(confirm=True) if passphrase else None)
    backups.write(held, file, secret)
    for one in held:
        say(f"{one.card.node}: {one.identity.key}")
    say(f"{file}: {len(held)} keys, {'encrypted' if secret else 'not encrypted'}")
    if secret is None:
        warn(f"whoever reads {file} can publish as these nodes: keep it where nobody else does")


def restore(
    source: Annotated[
        str, typer.Argument(metavar="FILE|KEY", help="A backup, or a public key that the data folder holds.")
    ],
    node: NodeOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: NodesOption = None,
    home: HomeOption = None,
) -> None:
    """Put keys back into the folders of their nodes: from a backup, or from the data folder.

    A key that is there already is never overwritten, and none is taken from a node that lives elsewhere.
    """
    from sapo.peers import key_backup as backups
    from sapo.peers import keyring

    found, settings = _locate(preset, config, counted([*(sets or []), *OPEN], nodes), home)
    file = Path(source)
    if not os.path.exists(file) and re.fullmatch("[0-9a-f]+", source) is None:
        remedy = "name a file that `sapo keys backup` wrote, or a key that `sapo keys show` prints"
        raise UserError("FILE|KEY", source, "is no file here, and no public key", remedy)
    if node is not None:
        _pick(settings, found, node)
    if os.path.exists(file):  # unlike Path.exists, it takes what is too long for a name
        wanted = backups.read(file).of(node, file)
        for key in wanted:
            _pick(settings, found, key.card.node)
        encrypted = any("ENCRYPTED" in key.pem for key in wanted)
        secret = (os.environ.get(backups.PASSPHRASE) or _ask(confirm=False)) if encrypted else None
        held = backups.opened(wanted, file, secret)
    else:
        node = _pick(settings, found, node)
        held = [keyring.load_kept(source)]
    for one in keyring.place(found, held, settings.swarm.name, node):
        say(f"{one.card.node}: {one.identity.key}")


def invite(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The public key that `sapo keys show` printed there.")
    ],
    days: Annotated[
        int, typer.Option("--days", metavar="N", min=1, max=3650, help="How long it is good.")
    ] = 30,
    node: NodeOption = None,
    home: HomeOption = None,
) -> None:
    """Invite a key into the swarm, as a node here that is a member: prints one line, for sapo keys accept.

    It is good from now on, at every site, as long as the member stays one.
    """
    from sapo.core.types import is_sound_key
    from sapo.peers import membership

    found = find_home(home)
    settings, manifest = found.load_config(), found.load_manifest()
    if manifest.entry != "invite":
        remedy = "say rules.entry=invite when a swarm is begun"
        raise UserError("rules.entry", manifest.entry, "nobody is invited into this swarm", remedy)
    if _KEY.fullmatch(key) is None or not is_sound_key(key):
        raise UserError("KEY", key, "is no public key", "give the 64 hex digits that `sapo keys show` prints")
    here = [name for name in found.here(settings) if found.key(name).exists()]
    held = {name: _held(found, settings, name) for name in here}
    members = [name for name, one in held.items() if one.identity.key in manifest.members]
    name = node or (members[0] if members else _pick(settings, found, None))
    if name not in members:
        problem = "is no member, and only members invite"
        raise UserError("--node", name, problem, f"members here: {', '.join(members) or 'none'}")
    until = int(time.time()) + days * DAY_S
    invitation = membership.invite(held[name].identity, manifest.swarm, key, until)
    say(membership.Token(swarm=manifest.swarm, key=key, invitation=invitation).text())


def accept(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="What sapo keys invite printed.")],
    node: NodeOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    nodes: NodesOption = None,
    home: HomeOption = None,
) -> None:
    """Keep an invitation for a node here, which then shows it with every group it publishes.

    A node that runs shows it after its next start.
    """
    from sapo.core.config.manifest import Manifest
    from sapo.peers import keyring, membership

    found, settings = _locate(preset, config, counted(sets, nodes), home)
    manifest = found.load_manifest() if found.manifest.exists() else Manifest.of(settings)
    read, now = membership.Token.read(token), time.time()
    name = _pick(settings, found, node)
    held = _held(found, settings, name)
    read.refuse_unfit(manifest, held.identity.key, now)
    card = held.card.model_copy(update={"invitation": read.invitation})
    keyring.note(found, keyring.KeyAndCard(held.identity, card))
    say(f"{name} may publish in {manifest.swarm} until {membership.day(read.invitation.until)}")


def _locate(
    preset: str | None, file: Path | None, sets: list[str], home: Path | None
) -> "tuple[Home, Config]":
    """Home and config of a swarm that has begun, or that the command line describes."""
    from sapo.cli.commands import launch

    said = preset is not None or file is not None or set(sets) - set(OPEN)
    if said:
        found, config = launch.locate(preset, file, sets, home=home)
        if not found.manifest.exists():
            return found, config
        home = found.root
    return launch.locate(preset, file, sets, home=home, resume=True)


def _held(home: "Home", config: "Config", name: str) -> "KeyAndCard":
    from sapo.peers import keyring

    return keyring.take(home, config.swarm.name, name, time.time())


def _pick(config: "Config", home: "Home", name: str | None) -> str:
    from sapo.cli.commands import launch

    return launch.pick_node(config, home, name, "--node")


def _ask(*, confirm: bool) -> str:
    if not sys.stdin.isatty():
        remedy = "put it into SAPO_KEYS_PASSPHRASE"
        raise UserError("passphrase", None, "is needed, and nobody is there to be asked", remedy)
    answer: str = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return answer
