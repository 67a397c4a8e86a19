"""Two vLLM servers with kvplan between them: one prefills, the other decodes."""
