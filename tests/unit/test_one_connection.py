"""Prefect's server on SQLite: one connection, so that nobody waits for the file's lock."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from sapo.ops.services import prefect_file


def test_writers_take_turns_instead_of_waiting_for_the_file_s_lock(tmp_path: Path) -> None:
    address = prefect_file(tmp_path / "prefect.db", {})["PREFECT_SERVER_DATABASE_CONNECTION_URL"]

    async def write_at_once(writers: int) -> tuple[int, int]:
        # a writer that had to wait for the file's lock at all would fail at once
        engine = create_async_engine(address, connect_args={"timeout": 0})
        async with engine.begin() as connection:
            await connection.execute(text("create table t (x)"))

        async def write(number: int) -> None:
            async with engine.connect() as connection:
                await connection.execute(text("begin immediate"))
                await connection.execute(text("insert into t values (:x)"), {"x": number})
                await asyncio.sleep(0)
                await connection.commit()

        await asyncio.gather(*map(write, range(writers)))
        async with engine.connect() as connection:
            kept = (await connection.execute(text("select count(*) from t"))).scalar_one()
        await engine.dispose()
        return int(kept), engine.pool.size()  # type: ignore[attr-defined]

    assert asyncio.run(write_at_once(20)) == (20, 1)


@pytest.mark.parametrize(
    "name", ["PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL"]
)
def test_a_database_that_the_environment_names_is_left_to_its_operator(tmp_path: Path, name: str) -> None:
    assert prefect_file(tmp_path / "prefect.db", {name: "postgresql+asyncpg://u@h/db"}) == {}
