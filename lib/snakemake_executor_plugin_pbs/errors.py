"""Mistakes of the user."""

from snakemake_interface_common.exceptions import ApiError


class UserError(ApiError):
    """Stops the workflow. Snakemake prints an ApiError in one line, without a trace."""
