"""The vectors of a corpus on disk; encoding can be interrupted and goes on where it stopped.

The texts are copied first, then encoded in chunks into a mapped matrix; after each chunk the folder ``FOLDER.part``
says how far it is. It gets its name when it is complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trace_gym.envs.search.retrieval.corpus import corpus_digest, iter_corpus
from trace_gym.envs.search.retrieval.encoder import TextEncoder
from trace_gym.envs.search.retrieval.folder import Progress, Reports, write_meta
from trace_gym.envs.search.retrieval.passages import PassageStore, PassageWriter, create_array, load_array
from trace_gym.errors import BadInputError, unknown_name

FORMAT = "trace_gym dense 1"
DTYPES = ("float32", "float16")
_CHUNK = 512  # passages between two marks
_MARK = "encoded.json"


def index_settings(encoder: TextEncoder, dtype: str) -> dict[str, Any]:
    """Return what an index of this encoder says of itself; the same settings give the same vectors."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return {"format": FORMAT, "dtype": dtype, "dimension": encoder.dimension, **encoder.config.to_dict()}


def build_dense_index(
    corpus: Path, folder: Path, progress: Progress | None, encoder: TextEncoder, dtype: str = "float32"
) -> None:
    """Encode a corpus file.

    Args:
        corpus: File of JSON lines.
        folder: Where the index goes; nothing may be there.
        progress: Told the number of passages encoded so far.
        encoder: Makes the vectors.
        dtype: Of the vectors on disk, ``"float32"`` or ``"float16"``.

    Raises:
        BadInputError: For a bad line, or if something is at the place.
    """
    if folder.exists():
        raise BadInputError(f"{folder} exists already; remove it or choose another folder.")
    settings = {**index_settings(encoder, dtype), "corpus": corpus_digest(corpus)}
    part = folder.with_name(f"{folder.name}.part")
    done = _done(part, settings)
    if done is None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with PassageWriter(part) as writer:
            for passage in iter_corpus(corpus):
                writer.add(passage)
        create_array(part, "vectors", dtype, (len(PassageStore(part)), encoder.dimension))
        done = 0
    store, vectors, reports = PassageStore(part), load_array(part, "vectors", "r+"), Reports(progress)
    for first in range(done, len(store), _CHUNK):
        last = min(first + _CHUNK, len(store))
        texts = [f"{title}\n{text}" for _, title, text in (store[number] for number in range(first, last))]
        vectors[first:last] = encoder.encode_passages(texts)
        (part / _MARK).write_text(json.dumps({"settings": settings, "done": last}))
        reports.tell(last)
    reports.tell(len(store), last=True)
    write_meta(part, {**settings, "size": len(store)})
    (part / _MARK).unlink(missing_ok=True)
    part.rename(folder)


def _done(part: Path, settings: dict[str, Any]) -> int | None:
    """Return how many passages an interrupted run with equal settings has encoded; None if there is none."""
    try:
        mark = json.loads((part / _MARK).read_text())
    except (OSError, ValueError):
        return None
    return int(mark["done"]) if mark["settings"] == settings else None
