"""Whatever is done with a job opens its stores with the job's `storage` options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dpdask.engine.cluster import share_options
from dpdask.jobs.spec import Job

Args = ParamSpec("Args")
Result = TypeVar("Result")


def opens_stores(function: Callable[Concatenate[Job, Args], Result]) -> Callable[Concatenate[Job, Args], Result]:
    """Return a function of a job that opens the job's stores with its options, here and on the workers."""

    @functools.wraps(function)
    def opening(job: Job, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with share_options(job.stores):
            return function(job, *args, **kwargs)

    return opening  # type: ignore[return-value]  # `wraps` takes the first argument for a named one
