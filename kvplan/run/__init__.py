"""The launcher `python -m kvplan.run`, and the plugin of vLLM and SGLang."""
