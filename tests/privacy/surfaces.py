"""What a Dask cluster shows whoever may look at it: pages, logs, task streams, call stacks, events, errors, reports."""

import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote

PAGES = {
    "health",
    "json/counts.json",
    "info/main/workers.html",
    "info/main/exceptions.html",
    "metrics",
}
PLOTS = (  # those of the tasks and of what the workers do with them; the others show the machines' load, and one cannot be pulled
    *(
        "individual-task-stream",
        "individual-progress",
        "individual-graph",
        "individual-groups",
        "individual-group-progress",
    ),
    *(
        "individual-exceptions",
        "individual-memory-by-key",
        "individual-aggregate-time-per-action",
        "individual-profile",
        "events",
        "counters",
    ),
)


def kept_by_the_scheduler(dask_scheduler):
    """Return what the scheduler holds of every task, with the errors that it keeps, unpickled and as bytes."""
    tasks = list(dask_scheduler.tasks.values())
    held = [
        (
            str(task.key),
            task.exception_text,
            task.traceback_text,
            repr(task.annotations),
            repr(task.metadata),
        )
        for task in tasks
    ]
    erred = [
        (str(task.key), task.exception_text, task.traceback_text)
        for task in dask_scheduler.erred_tasks
    ]
    raw = [
        bytes(frame)
        for task in tasks
        for error in (task.exception, task.traceback)
        for frame in getattr(error, "frames", ())
    ]
    return repr(
        (held, erred, raw, repr(dask_scheduler.task_metadata), repr(dask_scheduler.computations))
    )


def kept_by_the_worker(dask_worker):
    """Return what a worker says of itself: its log, and the story of its tasks."""
    state = dask_worker.state
    tasks = [
        (str(task.key), task.exception_text, task.traceback_text, repr(task))
        for task in state.tasks.values()
    ]
    return repr((tasks, list(state.log), list(state.stimulus_log), dask_worker.get_logs()))


class Surfaces:
    """Collects all that a cluster shows, by the name of the surface; the same text is kept once.

    Parameters
    ----------
    client
        Of a cluster with a dashboard on this machine.
    """

    def __init__(self, client):
        self.client = client
        self.shown = defaultdict(set)
        self.sessions = {}

    def add(self, name, content):
        text = (
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else repr(content)).encode()
        )
        self.shown[name].add(text)

    def _page(self, name, port, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
                self.add(name, answer.read())
        except HTTPError as error:  # of a task that is gone, say: its text is shown, too
            self.add(name, error.read())

    def _ports(self):
        info = self.client.scheduler_info(n_workers=-1)
        self.add("identity", info)
        found = {"scheduler": info["services"]["dashboard"]}
        return found | {
            address: worker["services"]["dashboard"] for address, worker in info["workers"].items()
        }

    def look(self):
        """Look at what passes: what is there while a task runs, or until its client leaves."""
        client, ports = self.client, self._ports()
        keys = [
            str(key)
            for key in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
        ]
        self.add("task names", keys)
        stacks = client.call_stack()
        if stacks:
            self.add("call stacks", stacks)
        self.add("story", client.story(*keys[-8:], on_error="ignore"))
        self.add("scheduler state", client.run_on_scheduler(kept_by_the_scheduler))
        for page in PAGES:
            self._page(f"page {page}", ports["scheduler"], page)
        for address in ports.keys() - {"scheduler"}:
            for page in ("info/worker/{}.html", "info/call-stacks/{}.html"):
                self._page(f"page {page}", ports["scheduler"], page.format(quote(address, safe="")))
        for key in keys[-8:]:
            for page in ("info/task/{}.html", "info/call-stack/{}.html"):
                self._page(f"page {page}", ports["scheduler"], page.format(quote(key, safe="")))

    def look_back(self):
        """Look at what stays: logs, profiles, streams and histories of what has run."""
        client, ports = self.client, self._ports()
        self.add("task stream", client.get_task_stream())
        self.add("profile", client.profile())
        self.add("profile", client.profile(server=True))
        self.add("events", client.get_events())
        self.add("scheduler log", client.get_scheduler_logs())
        self.add("worker logs", client.get_worker_logs())
        self.add("nanny logs", client.get_worker_logs(nanny=True))
        self.add("worker state", client.run(kept_by_the_worker))
        self._page("page info/main/logs.html", ports["scheduler"], "info/main/logs.html")
        for address in ports.keys() - {"scheduler"}:
            self._page(
                "page info/logs/{}.html",
                ports["scheduler"],
                f"info/logs/{quote(address, safe='')}.html",
            )
            for page in ("health", "metrics"):
                self._page(f"worker page {page}", ports[address], page)

    def open_plots(self):
        """Open the dashboard's plots as a browser does; they fill while jobs run."""
        from bokeh.client import pull_session

        port = self._ports()["scheduler"]
        self.sessions = {
            path: pull_session(url=f"http://127.0.0.1:{port}/{path}") for path in PLOTS
        }

    def look_at_plots(self):
        """Look at what the plots show now: every source of data, and all else that a browser is sent."""
        for path, session in self.sessions.items():
            session.force_roundtrip()
            session.pull()
            self.add(f"plot {path}", session.document.to_json())
            for model in session.document.models:
                if hasattr(model, "data") and isinstance(model.data, dict):
                    self.add(
                        f"plot {path}", {name: list(values) for name, values in model.data.items()}
                    )

    def close(self):
        for session in self.sessions.values():
            session.close()

    def with_report(self, work):
        """Do the work inside Dask's performance report, and add what it and a dump of the cluster say."""
        from distributed import performance_report

        with tempfile.TemporaryDirectory() as folder:
            with self.client.as_current(), performance_report(filename=f"{folder}/report.html"):
                work()
            self.add("performance report", Path(folder, "report.html").read_bytes())
            self.client.dump_cluster_state(f"{folder}/state", format="yaml")
            self.add("dump", Path(folder, "state.yaml").read_bytes())

    def found(self, values):
        """Return which of the planted values stand on which surface."""
        hits = defaultdict(set)
        for name, texts in self.shown.items():
            for value, forms in values.items():
                if any(form in text for text in texts for form in forms):
                    hits[name].add(value)
        return dict(hits)


def forms(value):
    """Return how a value may stand in a text, a repr or a pickle."""
    if isinstance(value, bytes):
        return [value, value.hex().encode(), repr(value)[2:-1].encode()]
    return [str(value).encode()]
