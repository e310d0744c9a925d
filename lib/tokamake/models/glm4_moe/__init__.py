"""The family `glm4_moe`."""
