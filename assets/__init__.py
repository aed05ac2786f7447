"""Bundled data: tasks, corpus, prompts and the template of the tree viewer."""
