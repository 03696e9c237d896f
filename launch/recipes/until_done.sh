#!/usr/bin/env bash
# until_done.sh COMMAND...: a training command whose exit code a cluster can act on; see run_to_end in parts.sh.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=parts.sh
source "$here/parts.sh"
run_to_end "$@"
