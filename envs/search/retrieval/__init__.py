"""Retrieval: five engines behind one interface, and a server that offers each of them to others.

Open one with `open_retriever`; without Java, ``"embedded"`` returns the lists that Lucene returns.
"""

from trace_gym.envs.search.retrieval.base import Hit, Passage, Retriever
from trace_gym.envs.search.retrieval.corpus import iter_corpus, read_corpus
from trace_gym.envs.search.retrieval.shared import open_retriever

__all__ = ["Hit", "Passage", "Retriever", "iter_corpus", "open_retriever", "read_corpus"]
