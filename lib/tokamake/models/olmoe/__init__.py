"""The family `olmoe`."""
