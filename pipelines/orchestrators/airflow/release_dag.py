"""An Airflow DAG that runs a dpdask job once a day; ε, the budget left and the released rows are its XComs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException
from dpdask_job import RETRIES, RETRY_SECONDS, GiveUpError, run_job


@dag(
    schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, max_active_runs=1
)
def dpdask_release() -> None:
    """Release a job's table."""

    @task(
        retries=RETRIES,
        retry_delay=timedelta(seconds=RETRY_SECONDS),
        retry_exponential_backoff=2,
        max_retry_delay=timedelta(hours=1),
        multiple_outputs=True,
    )
    def release() -> dict[str, Any]:
        """Run the job; only what may pass is tried again."""
        try:
            return run_job(logging.getLogger(__name__).info)
        except GiveUpError as error:
            raise AirflowFailException(str(error)) from None

    release()


dpdask_release()
