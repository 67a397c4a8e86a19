"""`kvplan keygen`: make a new cluster key in a new file."""

from __future__ import annotations

import click

from kvplan.cli.common import ExitCode, json_option, write_json

SCHEMA_VERSION = 1


@click.command(
    "keygen",
    epilog="Example: kvplan keygen /etc/kvplan/cluster.key",
)
@click.argument("path", type=click.Path())
@json_option
def command(path: str, *, as_json: bool) -> ExitCode:
    """Make the key of a cluster in the new file PATH.

    Copy it to every host of the cluster, mode 0600; engines are given it as
    kvplan.cluster_key_file. A file that exists is left as it is.
    """
    from kvplan.control.auth import ClusterKey  # no other command needs ZeroMQ

    try:
        ClusterKey.generate().save(path)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists, and is left as it is: a new key would shut out every engine "
            "that uses this one. Give another path, or remove the file first"
        ) from None
    if as_json:
        write_json({"schema_version": SCHEMA_VERSION, "path": path})
    else:
        click.echo(f"{path}: a new cluster key; anyone who can read it can link")
    return ExitCode.OK
