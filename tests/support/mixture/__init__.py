"""A family that tests add: each MLP is a sum of experts, weighted by a router."""
