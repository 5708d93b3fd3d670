"""Ray Serve LLM over the emulated fleet; runs where Ray and the vLLM that it asks for are."""
