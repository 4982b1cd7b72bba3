"""Retention of flow runs, over Prefect's API: whoever runs the server, its database stays bounded."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException

from sapo.core.errors import Unavailable

from .orchestrator import FINAL

AT_ONCE = 50
"""Flow runs that Prefect deletes in one request."""


def forget(days: float, *tags: str) -> int:
    """Delete flow runs that ended more than `days` ago, with their task runs, states, logs and artifacts.

    A run of any of `tags` goes, of a server that others use too; without tags all go. `days` 0 keeps all.
    Returns how many were deleted. Raises `Unavailable` when Prefect is away.
    """
    if not days:
        return 0
    before = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    wanted: dict[str, Any] = {"end_time": {"before_": before}, "state": {"type": {"any_": list(FINAL)}}}
    wanted |= {"tags": {"any_": list(tags)}} if tags else {}
    deleted = 0
    try:
        with get_client(sync_client=True) as client:
            while True:
                found = _ask(client, "/flow_runs/filter", flow_runs=wanted, limit=AT_ONCE)
                if not found:
                    return deleted
                ids = [run["id"] for run in found]
                # nothing else deletes what a run has published
                while left := _ask(client, "/artifacts/filter", artifacts={"flow_run_id": {"any_": ids}}):
                    for artifact in left:
                        client.delete_artifact(artifact["id"])
                _ask(client, "/flow_runs/bulk_delete", flow_runs={"id": {"any_": ids}})
                deleted += len(ids)
    except (httpx.HTTPError, PrefectException, OSError) as error:
        raise Unavailable(f"Prefect: {' '.join(str(error).split())[:500]}") from error


def _ask(client: SyncPrefectClient, route: str, **body: Any) -> list[dict[str, Any]]:
    reply = client.request("POST", route, json=body)  # type: ignore[arg-type]
    reply.raise_for_status()
    found = reply.json()
    return found if isinstance(found, list) else []
