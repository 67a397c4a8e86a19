"""Recordings of engines: what was transferred, when, by which plan, and what became of it.

`LlmDataDist.record` writes them, `read` reads them: see docs/recording.md.
"""
