"""Megatron's indexed dataset (.bin/.idx): write, merge, describe, verify, repair, trace."""
