"""A Dagster asset that a dpdask job materialises; ε, the budget left and the released rows are its metadata."""

from dagster import (
    AssetExecutionContext,
    Backoff,
    Definitions,
    Failure,
    MaterializeResult,
    RetryPolicy,
    asset,
)
from dpdask_job import RETRIES, RETRY_SECONDS, GiveUpError, run_job


@asset(
    retry_policy=RetryPolicy(max_retries=RETRIES, delay=RETRY_SECONDS, backoff=Backoff.EXPONENTIAL)
)
def release(context: AssetExecutionContext) -> MaterializeResult:
    """The release of a job's table; only what may pass is tried again."""
    try:
        return MaterializeResult(metadata=run_job(context.log.info))
    except GiveUpError as error:
        raise Failure(str(error), allow_retries=False) from None


defs = Definitions(assets=[release])
