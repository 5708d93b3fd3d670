"""Tests of the vLLM facade, against the installed vLLM's own classes."""
