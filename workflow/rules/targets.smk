# The name of a rule as a target means all runs.
#
# Snakemake itself takes no rule with wildcards for a target. It hands over what a user asks for once
# the rules are read, and here each such rule becomes the files that it makes.


from snakemake.io import strip_wildcard_constraints


def made_for_all(name):
    """What the rule of that name makes for all runs; nothing where it makes other things, too."""
    if name == "convert":
        return CONVERTED or sys.exit(
            "tokamake: convert: the config names no form; list some, as in convert: [mds-tp2], or "
            "ask for one: results/RUN/convert/FORM"
        )
    if name == "import_checkpoint":
        return IMPORTED or sys.exit(
            "tokamake: import_checkpoint: every run starts from a checkpoint that training reads "
            "as it is; there is nothing to convert"
        )
    if name == "doctor":
        return [EXAMINED]
    made_by = workflow.get_rule(name)
    if not {"run"} <= made_by.wildcard_names <= {"run", "segment"}:
        return []
    return expand(map(strip_wildcard_constraints, made_by.output), run=RUNS, segment="")


def spread(targets):
    """Targets, with each rule that makes something for a run as what it makes for all of them."""
    found = set()
    for target in targets:
        found |= set(workflow.is_rule(target) and made_for_all(target) or [target])
    return found


class SpreadWorkflow(type(workflow)):
    """Snakemake's workflow, but for the targets."""

    @property
    def dag_settings(self):
        return self.__dict__["dag_settings"]

    @dag_settings.setter
    def dag_settings(self, given):
        given.targets = spread(given.targets)
        self.__dict__["dag_settings"] = given


workflow.__class__ = SpreadWorkflow
