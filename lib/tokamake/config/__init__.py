"""What a run may be told: a Pydantic model a section of config/config.yaml, a docstring a field.

Values come from YAML, through the workflow or `tokamake train --config`, and stay frozen. Nothing
here knows where a run takes place: that is the profiles' business.
"""
