"""Each stored byte is read once, whatever the two layouts, and the layout that was made reads
hardly more than it needs."""

import pytest
import reshard_amplification as tool


@pytest.mark.long
@pytest.mark.parametrize("memory_limit", ["36MiB", "512MiB"])
def test_a_whole_job_reads_a_twentieth_too_much_at_most_and_just_what_was_planned(
    tmp_path, memory_limit
):
    figures = tool.measure(
        8, pairs=6, seed=0, memory_limit=memory_limit, really=1, directory=tmp_path
    )

    assert figures["job"]["worst"] <= 1.05
    assert figures["restore"]["worst"] <= 1.02
    assert figures["wrong"] == []
