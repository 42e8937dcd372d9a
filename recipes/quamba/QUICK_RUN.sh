#!/usr/bin/env bash
# Record, compare and summarise all modes, or those that are named:
#
#   ./QUICK_RUN.sh [all|essential|modes…] [options of save_layer_outputs.py]
#
# Exit code: 0 done, 2 trouble; a mode that fails does not stop the others.

case "$1" in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
eval "$(grep -m 1 '^OUTPUT_DIR=' "$here/save_all_modes.sh")" # where that script writes
began="$(mktemp)"
trap 'rm -f "$began"' EXIT
"$here/save_all_modes.sh" "$@"
saved=$?
while (($#)); do
    case "$1" in
        --output_dir) OUTPUT_DIR="$2" ;;
        --output_dir=*) OUTPUT_DIR="${1#*=}" ;;
    esac
    shift
done
# Where nothing was saved, an older table would look like this run's.
[[ -n $(find "$OUTPUT_DIR" -name 'mode_*_stats.json' -newer "$began" 2>/dev/null) ]] || exit "$saved"
"$here/compare_all_modes.sh" --output_dir "$OUTPUT_DIR"
compared=$?
((saved == 0)) || exit "$saved"
exit "$compared"
