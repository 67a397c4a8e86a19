"""The launcher `python -m kvplan.run`, the plugin of vLLM and SGLang, and nothing else."""
