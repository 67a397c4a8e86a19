"""Version 1 of the official package, which kvplan does not have: the import raises."""

raise ModuleNotFoundError(
    "kvplan has no version 1 of llm_datadist (KvCacheManager, Tensor, TensorDesc); "
    'set llm.EnableCacheManager="1" (LLMConfig.enable_cache_manager = True), and use '
    "LLMDataDist.cache_manager of llm_datadist",
    name=__name__,
)
