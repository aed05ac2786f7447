"""Named data sets without a hub: one line that says what to do, soon, whatever the environment and the set."""

import os
import subprocess
import sys

import pytest

EVERY_SET = """
from trace_gym.envs.math.tasks.named import NAMED as MATH, load_data
from trace_gym.envs.search.tasks.named import NAMED as SEARCH, load_questions
from trace_gym.errors import InfrastructureError
for names, load in ((MATH, load_data), (SEARCH, load_questions)):
    for name in names:
        try:
            load(name)
        except InfrastructureError as error:
            print(name, str(error).replace(chr(10), '<newline>'), sep=chr(9))
"""


@pytest.mark.slow  # imports the library
def test_without_a_hub_every_named_set_says_so_in_one_line(tmp_path):
    """With the real client, which by itself tries for half a minute and reports every try."""
    pytest.importorskip("datasets")
    gone = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", EVERY_SET]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **gone}, check=True)
    assert done.stderr == ""
    said = dict(line.split("\t") for line in done.stdout.splitlines())
    assert len(said) >= 18
    for name, line in said.items():
        assert "the hub cannot be reached (ConnectError: " in line and f"write '{name}=PATH'" in line, line
        assert "<newline>" not in line
    assert "hf auth login" in said["gpqa-diamond"]
