"""Health of runs on a page: the findings of the looks during training."""

from tammes.lab.records.run_folder import read_each
from tammes.lab.report.load_runs import LoadedRuns
from tammes.lab.report.render import html_page as page
from tammes.lab.training.health import moment


def health_blocks(loaded: LoadedRuns) -> list[page.Block]:
    """Return a table of the findings of all runs; nothing if no run was looked at."""
    rows: list[list[page.Cell]] = []
    looked_at = 0
    for place, group in enumerate(loaded.groups):
        # Damaged files are listed under the results.
        for run, looks in read_each(group.every, "health"):
            looked_at += bool(looks)
            known = set()
            for look in looks:
                when = moment(look["epoch"], run.config.epochs)
                for found in look["findings"]:
                    if found["name"] in known:
                        continue
                    known.add(found["name"])
                    rows.append(
                        [
                            page.Value(group.label, color=place),
                            run.config.seed,
                            found["name"],
                            found["severity"],
                            when,
                            f"{found['measured']}; {found['why']}.",
                            f"{found['change']}.",
                        ]
                    )
    if not looked_at:
        return []
    if not rows:
        return [page.Text(f"No findings in {looked_at} {'run' if looked_at == 1 else 'runs'}.")]
    heads = ("group", "seed", "finding", "severity", "first seen", "measured", "what to change")
    return [page.Table(heads, rows, "docs/doctor.md explains each finding.")]
