"""Common parts of both tracks' stages: the teacher, executors, languages, and the held-out partition."""
