"""A prefill/decode router that knows push: both legs at once, and one outcome for both.

Imports nothing of vllm or nixl, so that it runs on a machine that has neither.
"""
