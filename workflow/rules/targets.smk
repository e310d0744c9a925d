# The name of a rule as a target means all runs; what nothing makes is told in a line.
#
# Snakemake itself takes no rule with wildcards for a target. It hands over what a user asks for once
# the rules are read, and here each such rule becomes the files that it makes.


from difflib import get_close_matches

from snakemake.io import strip_wildcard_constraints

from snakemake_executor_plugin_pbs.errors import UserError as ExecutorError
from snakemake_executor_plugin_pbs.personal import missing_in_workflow


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
    if name == "plan_segments":
        return expand(rules.plan_segments.output, run=OPEN_ENDED) or sys.exit(
            "tokamake: plan_segments: there is nothing to plan: no run has train.segment_steps and "
            "the length of its corpora's epochs"
        )
    if name == "doctor":
        return [EXAMINED]
    made_by = workflow.get_rule(name)
    if not {"run"} <= made_by.wildcard_names <= {"run", "segment"}:
        return []
    return expand(map(strip_wildcard_constraints, made_by.output), run=RUNS, segment="")


def is_made(path):
    """Whether some rule makes a file."""
    return any(rule.is_producer(path) for rule in workflow.rules)


def check_target(target):
    """See that something makes what a user asks for, before Snakemake looks for it."""
    path = os.path.relpath(target)
    top, _, rest = path.partition("/")
    name, _, rest = rest.partition("/")
    if found := re.fullmatch(r"(train|evaluate)\.(\d+)\.json", rest) if name in RUNS else None:
        last = RUNS[name].train.num_steps
        if last is not None and int(found[2]) >= last:
            sys.exit(
                f"tokamake: {target}: run {name} ends at step {last:,}; what its last job makes is "
                f"results/{name}/{found[1]}.json, and segments end at steps before"
            )
    if is_made(path) or os.path.exists(path):
        return
    if top == "results" and any(is_made(f"{RUN.format(run=run)}/{rest}") for run in RUNS):
        sys.exit(f"tokamake: {target}: no run is called {name}; there is {', '.join(RUNS)}")
    names = [rule.name for rule in workflow.rules]
    close = get_close_matches(target, names, n=1)
    advice = f"did you mean {close[0]}?" if close else "`snakemake --list` lists the rules"
    sys.exit(f"tokamake: {target}: no rule is called so, or makes it; {advice}")


def spread(targets):
    """Targets, with each rule that makes something for a run as what it makes for all of them."""
    found = set()
    for target in targets:
        if workflow.is_main_process and not workflow.is_rule(target):
            check_target(target)
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

# Account, queue and the like. In a dry run there is no executor to ask for them.
if workflow.is_main_process:
    try:
        message = missing_in_workflow(workflow)
    except ExecutorError as error:  # the user's file is wrong
        message = str(error)
    if message:
        sys.exit(f"tokamake: {message}")
