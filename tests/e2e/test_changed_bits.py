"""No bytes of a file end a process, or end a command with 70: a changed bit is refused in one line, or read right."""

import pytest
from e2e.changed_bits import KINDS, SETTINGS

PLACES = [
    *(
        (kind, part)
        for kind in (*SETTINGS, "public table", "release")
        for part in ("footer", "pages")
    ),
    ("delta", "file"),
    ("iceberg", "file"),
]


@pytest.mark.parametrize(
    "n",
    [
        pytest.param(8, marks=pytest.mark.few(4)),
        pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
@pytest.mark.parametrize(("kind", "part"), PLACES)
def test_a_changed_bit_is_refused_in_one_line_or_read_right(kind, part, n, drivers):
    done = drivers.python(
        "import sys\nfrom e2e.changed_bits import main\nmain(sys.argv[1], sys.argv[2], int(sys.argv[3]))",
        kind,
        part,
        str(n),
    )
    assert done.returncode == 0, done.stderr[-1000:]


def test_every_kind_is_changed():
    assert {kind for kind, _ in PLACES} == set(KINDS)
