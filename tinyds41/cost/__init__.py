"""What a model costs: parameters, cache bytes and work per token, counted from what is there."""
