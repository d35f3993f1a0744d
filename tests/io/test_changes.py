"""Which rows the commits of a table leave to release: each once, whatever was compacted, deleted or changed in between."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpdask.errors import InputError
from dpdask.io.changes import Place, TableCommit, follow, tell_gap
from dpdask.io.lakes import classify_entry


class Table:
    """A table of numbered rows in files, with the files of each of its versions."""

    def __init__(self):
        self.versions = [{}]
        self.commits = []
        self.n_rows = self.n_files = 0

    def file(self, rows):
        self.n_files += 1
        return {f"f{self.n_files}": frozenset(rows)}

    def new_rows(self, n=3):
        self.n_rows += n
        return range(self.n_rows - n, self.n_rows)

    def commit(self, kind, gone=(), added=None, *, is_closed=True):
        now, added = self.versions[-1], added or {}
        self.versions.append({name: rows for name, rows in now.items() if name not in gone} | added)
        version = len(self.versions) - 1
        self.commits.append(
            TableCommit(
                version=version,
                before=version - 1,
                kind=kind,
                added=frozenset(added),
                removed=frozenset(gone),
                is_closed=is_closed,
            )
        )

    def act(self, what, chosen):
        """Do something to the chosen files; return the rows that were deleted, and those that were changed."""
        now = self.versions[-1]
        gone = [name for name in now if chosen.pop()]
        rows = frozenset().union(*(now[name] for name in gone))
        half = frozenset(row for row in rows if row % 2)
        if what == "append":
            self.commit("append", (), self.file(self.new_rows()))
        elif what == "compact" and gone:
            self.commit("rewrite", gone, self.file(rows))
        elif what == "drop" and gone:
            self.commit("delete", gone)
            return rows, frozenset()
        elif what == "delete" and gone:
            self.commit("delete", gone, self.file(rows - half))
            return half, frozenset()
        elif what == "merge" and gone:
            self.commit("change", gone, self.file(rows) | self.file(self.new_rows()))
            return frozenset(), rows
        return frozenset(), frozenset()

    def read(self, followed):
        """Return the rows of a release, as often as they are in it."""
        until = followed.until or 0
        return Counter(
            row
            for name, at in followed.files.items()
            for row in self.versions[until if at is None else at][name]
        )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "compact", "drop", "delete", "merge", "run"]),
        st.lists(st.booleans(), min_size=60, max_size=60),
    ),
    max_size=14,
)


@pytest.mark.parametrize("policy", ["ignore", "release"])
@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_each_row_is_released_once_and_again_where_the_policy_says(policy, steps):
    table, since = Table(), 0
    released = Counter()
    n_again = 0
    deleted = set()
    changed = set()
    inserted = set()
    for what, chosen in [*steps, ("run", [])]:
        if what != "run":
            before = table.n_rows
            gone, moved = table.act(what, list(chosen))
            deleted |= gone
            changed |= moved
            if what == "merge":
                inserted |= set(range(before, table.n_rows))
            continue
        more = True
        while more:
            found = follow(table.commits[since:], since, policy, (), "table")
            rows, since, more = table.read(found), found.until or 0, found.more
            assert set(rows.values()) <= {1}
            assert found.again or not released.keys() & rows.keys()
            released += rows
            n_again += found.again
    assert max(released.values(), default=0) <= 1 + (n_again if policy == "release" else 0)
    quiet = set(range(table.n_rows)) - deleted - changed - inserted
    assert quiet <= released.keys()  # nothing is lost
    if policy == "release":
        assert set().union(*table.versions[-1].values()) <= released.keys()


def step(kind, added=(), removed=(), version=1, **more):
    return TableCommit(
        version=version,
        before=version - 1,
        kind=kind,
        added=frozenset(added),
        removed=frozenset(removed),
        **more,
    )


def test_a_change_is_refused_unless_no_released_row_is_concerned():
    change = step("change", ["b"], ["a"], 2, is_closed=True)
    with pytest.raises(InputError, match="version 2 of the table changed rows") as raised:
        follow([change], 1, "refuse", (), "lake")
    assert "changed: ignore" in str(raised.value)
    new = step("append", ["a"])
    assert follow([new, change], 0, "refuse", (), "lake").files == {"b": None}
    with pytest.raises(InputError):  # the log does not say what it was
        follow([new, step("change", ["b"], ["a"], 2)], 0, "refuse", (), "lake")


def test_a_released_file_that_comes_back_is_a_change():
    back = step("append", ["a", "b"])
    with pytest.raises(InputError, match="changed rows"):
        follow([back], 0, "refuse", {"a"}, "lake")
    assert follow([back], 0, "release", {"a"}, "lake").again


def test_rows_that_were_masked_by_an_ignored_change_are_read_as_they_were():
    steps = [step("append", ["a"]), step("change", ["c"], ["x"], 2, masked=frozenset(["a"]))]
    assert follow(steps, 0, "ignore", (), "lake").files == {"a": 1}


def test_a_gap_names_its_versions_and_the_way_on():
    error = tell_gap(3, 7, 9, "lake")
    assert isinstance(error, InputError)
    assert "from version 3 to 7" in str(error)
    assert "`dpdask rebase JOB --at 9`" in str(error)
    assert Place("t", 3) == ("t", 3)


def add(path, n_masked=None, **more):
    vector = {} if n_masked is None else {"deletionVector": {"cardinality": n_masked}}
    return {"add": {"path": path, "dataChange": True, **vector, **more}}


def remove(path, n_masked=None, **more):
    return {"remove": add(path, n_masked, **more)["add"]}


@pytest.mark.parametrize(
    ("operation", "actions", "kind", "is_closed"),
    [
        ("WRITE", [add("a")], "append", True),
        (None, [add("a")], "append", False),
        ("MERGE", [add("a")], "append", True),
        ("OPTIMIZE", [add("b", dataChange=False), remove("a", dataChange=False)], "rewrite", False),
        ("DELETE", [add("b"), remove("a")], "delete", True),
        ("DELETE", [remove("a")], "delete", True),
        ("WRITE", [remove("a")], "delete", True),
        ("DELETE", [add("a", 2), remove("a", 1)], "delete", True),
        (None, [add("a", 2), remove("a")], "delete", False),
        ("UPDATE", [add("b"), remove("a")], "change", True),
        ("UPDATE", [add("a", 2), remove("a"), add("b")], "change", True),
        ("WRITE", [add("b"), remove("a")], "change", True),
        (None, [add("b"), remove("a")], "change", False),
        ("RESTORE", [add("a")], "change", False),
        ("DELETE", [add("a", 1), remove("a", 2)], "change", False),
        ("DELETE", [add("a"), remove("a")], "change", False),
    ],
)
def test_an_entry_of_a_delta_log_is_told_by_its_operation(operation, actions, kind, is_closed):
    about = [{"commitInfo": {"operation": operation}}] if operation else []
    [found] = classify_entry(4, [*about, *actions])
    assert (found.version, found.before, found.kind, found.is_closed) == (4, 3, kind, is_closed)


def test_an_entry_without_files_does_nothing():
    assert classify_entry(4, [{"metaData": {}}, {"commitInfo": {"operation": "WRITE"}}]) == []
