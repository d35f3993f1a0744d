"""A Prefect flow that runs a dpdask job; ε, the budget left and the released rows are an artifact."""

from __future__ import annotations

from typing import Any

from dpdask_job import RETRIES, RETRY_SECONDS, TryAgainError, run_job
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff


def may_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed attempt is worth another."""
    return isinstance(state.result(raise_on_failure=False), TryAgainError)


@task(
    retries=RETRIES,
    retry_delay_seconds=exponential_backoff(RETRY_SECONDS),
    retry_condition_fn=may_pass,
)
def release() -> dict[str, Any]:
    """Run the job; only what may pass is tried again."""
    return run_job(get_run_logger().info)


@flow
def dpdask_release() -> dict[str, Any]:
    """Release a job's table."""
    found = release()
    create_table_artifact(key="dpdask-release", table=[found])
    return found


if __name__ == "__main__":
    dpdask_release()
