"""A pinned wheel is the file with that hash or an error that says how to get it; never something in between."""

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_gym.cache import cache_folder
from trace_gym.envs.pinned_wheel import PinnedWheel
from trace_gym.errors import InfrastructureError

VARIABLE = "TRACE_GYM_TEST_WHEEL"
NAME = "tiny_parcel-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache of the test's own, and a pip that knows no index."""
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def file(tmp_path):
    """A real wheel of one module."""
    path = tmp_path / "by_hand" / NAME
    path.parent.mkdir()
    about = "tiny_parcel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_parcel.py", "CONTENT = 1\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-parcel\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def pinned(file):
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return PinnedWheel("tiny-parcel", "1.0", digest, VARIABLE, "this test")


def is_unpacked(folder):
    return (folder / "tiny_parcel.py").read_text() == "CONTENT = 1\n"


def test_a_wheel_named_by_the_variable_is_used(file, monkeypatch):
    """No index and no pip is needed; the second use needs no wheel either."""
    monkeypatch.setenv(VARIABLE, str(file))
    assert is_unpacked(pinned(file).unpacked())
    wheel = pinned(file)
    file.unlink()
    assert is_unpacked(wheel.unpacked())


def test_a_wheel_copied_into_the_cache_is_used(file):
    """The second way by hand that the error names."""
    cache_folder("wheels").mkdir(parents=True)
    (cache_folder("wheels") / NAME).write_bytes(file.read_bytes())
    assert is_unpacked(pinned(file).unpacked())


@pytest.mark.slow
def test_pip_fetches_the_wheel_from_wherever_it_is_configured_to(file, monkeypatch):
    """Here a folder in place of an index."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    assert is_unpacked(pinned(file).unpacked())
    assert [path.name for path in cache_folder("wheels").iterdir()] == [pinned(file).folder.name], "it left something"


@pytest.mark.parametrize("way", ["variable", "cache"])
def test_a_wheel_with_another_hash_is_never_opened(file, monkeypatch, way):
    """Not even if it came by hand."""
    wheel = pinned(file)
    other = file if way == "variable" else cache_folder("wheels") / NAME
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(b"not a wheel")
    if way == "variable":
        monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(InfrastructureError, match=f"has the sha256 {hashlib.sha256(b'not a wheel').hexdigest()}"):
        wheel.unpacked()
    assert not wheel.folder.exists()


def test_without_a_way_to_get_it_one_error_says_what_to_do(file, monkeypatch, tmp_path):
    """What is needed, what for, what pip said (here that there is none, as in environments of uv), the way by hand."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    wheel = pinned(file)
    with pytest.raises(InfrastructureError) as caught:
        wheel.unpacked()
    said = str(caught.value)
    for part in (NAME, wheel.sha256, "this test", "No module named pip", "pip download --no-deps", VARIABLE):
        assert part in said
    assert str(cache_folder("wheels")) in said
    assert list(cache_folder("wheels").iterdir()) == []


def test_a_variable_that_names_no_file_is_an_error(file, monkeypatch, tmp_path):
    """A typing mistake does not lead to a download."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere.whl"))
    with pytest.raises(InfrastructureError, match="is no file"):
        pinned(file).unpacked()


def test_parallel_first_uses_all_get_the_whole_folder(file, monkeypatch):
    """The folder appears at once, whoever is first."""
    monkeypatch.setenv(VARIABLE, str(file))
    wheel = pinned(file)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: wheel.unpacked(), range(32)))
    assert all(map(is_unpacked, folders))
    assert [path.name for path in cache_folder("wheels").iterdir()] == [wheel.folder.name]
