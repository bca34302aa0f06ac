"""A decode worker: takes verified caches, samples every token, streams text."""
