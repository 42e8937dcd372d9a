#!/usr/bin/env bash
# Save the input and the output of the first layer of many modes, in one file and one process:
#
#   ./capture_first_layer.sh              fp32 and all quantised modes
#   ./capture_first_layer.sh essential    fp32, 0, 2-1, 2-2, 2-4
#   ./capture_first_layer.sh quant_only   the quantised modes alone
#   ./capture_first_layer.sh fp32 0 2-1   these modes
#
# Options of save_first_layer_io.py may follow: ./capture_first_layer.sh essential --seq_len 1024
# Exit code: 0 saved, 2 trouble; a mode that fails does not stop the others.

MODEL="quamba-130m-w8a8"                                     # the model's name
PRETRAINED_DIR="pretrained_models/Quamba1-pa9999/pa-0.9999"  # its weights
OUTPUT_FILE="first_layer_io_all_modes.npz"                   # the file; its statistics beside it
SEQ_LEN=512                                                  # tokens

case "$1" in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
modes=()
while (($#)) && [[ $1 != --* ]]; do
    modes+=("$1")
    shift
done
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/save_first_layer_io.py" \
    --model "$MODEL" \
    --pretrained_dir "$PRETRAINED_DIR" \
    --modes "${modes[@]:-all}" \
    --output_file "$OUTPUT_FILE" \
    --seq_len "$SEQ_LEN" "$@"
