"""HTTP: the OpenAI and SGLang routes, tokenising and detokenising. Knows no torch."""
