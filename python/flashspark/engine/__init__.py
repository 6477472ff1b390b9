"""Device side: model runner, KV pools, request rows and weight loading."""
