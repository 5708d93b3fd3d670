"""Two real vLLM engines, real NIXL, one fleet per test session."""
