"""Errors that the user can fix."""

from snakemake_interface_common.exceptions import ApiError


class UserError(ApiError):
    """Stops the workflow. Snakemake prints an ApiError as one line, without a traceback."""
