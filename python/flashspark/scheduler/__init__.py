"""Host side: requests, admission, KV pages and the step loop. Knows no CUDA."""
