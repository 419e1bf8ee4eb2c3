"""Runs commands of the module that is named in children forked after the imports, which are most of their cost.

Reads requests from stdin and writes answers to stdout, a line of JSON each:
[arguments, environment, directory] -> [exit code, stdout, stderr].
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from tempfile import TemporaryFile
from typing import IO

from kvps_cli import main

app = importlib.import_module(sys.argv[1]).app


def _serve() -> None:
    for line in sys.stdin:
        with TemporaryFile() as out, TemporaryFile() as err:
            child = os.fork()
            if not child:
                _become(out, err, *json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps([code, *map(_content, (out, err))]), flush=True)


def _become(out: IO[bytes], err: IO[bytes], arguments: list[str], environment: dict[str, str], directory: str) -> None:
    code = 1
    try:
        for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
            os.dup2(file, number)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [app.info.name or "kvps", *arguments]
        main(app)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    _serve()
