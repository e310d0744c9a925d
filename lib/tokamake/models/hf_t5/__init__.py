"""The family `hf_t5`."""
