#!/usr/bin/env bash
# Compare every saved mode with fp32, and make the summary table:
#
#   ./compare_all_modes.sh [options of compare_with_fp.py]
#
# Exit code: 0 the table was made, whatever is in it; 2 a mode could not be compared.

REFERENCE="fp32"                                             # the mode to compare with

case "$1" in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
eval "$(grep -m 1 '^OUTPUT_DIR=' "$here/save_all_modes.sh")" # where that script writes
exec "${PYTHON:-python3}" "$here/compare_with_fp.py" all \
    --reference "$REFERENCE" --output_dir "$OUTPUT_DIR" "$@"
