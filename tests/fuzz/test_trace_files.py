"""Broken traces of a profiler: refused by file and reason, or times that are possible after all."""

import gzip
import json
import math
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.mangling import fuzzed, mangled_bytes, mangled_json, message_of
from tests.timelyfreeze.whatif.traces_by_hand import event, kernel, launch, note
from timelyfreeze.whatif.trace_file import is_trace, read_trace_files

CPU = [note("0F0", 0.0, 9.0), event("aten::mm", 2.0, 5.0), note("0B0", 20.0, 9.0)]
GPU = [note("0F0", 0.0, 9.0), launch(1, 2.0), kernel(1, 5.0, 90.0), note("0B0", 20.0, 9.0)]
TEXTS = [{"schemaVersion": 1, "traceEvents": events} for events in (CPU, GPU)]
# A batch whose backward is missing is no error of a value, but of the traces together.
CUT_OFF = json.dumps({"schemaVersion": 1, "traceEvents": GPU[:-1]}).encode()
MANGLED = [
    mangled_json(text).map(str.encode) | mangled_bytes(json.dumps(text).encode()) for text in TEXTS
]


@fuzzed(60)
@given(data=st.one_of(MANGLED), packed=st.booleans(), cut=st.integers(0, 40))
@example(data=CUT_OFF, packed=False, cut=0)
def test_a_broken_trace_is_named(tmp_path: Path, data: bytes, packed: bool, cut: int) -> None:
    path = tmp_path / "trace.json"
    raw = gzip.compress(data) if packed else data
    path.write_bytes(raw[: len(raw) - cut] if packed else raw)

    def read() -> None:
        file = read_trace_files([path])
        assert all(0.0 <= low <= high < math.inf for low, high in file.table.bounds.values())
        assert not any(times.errors() for times in file.stage_times())

    message = message_of(read)
    assert message is None or str(path) in message
    assert is_trace(path) in (True, False)
