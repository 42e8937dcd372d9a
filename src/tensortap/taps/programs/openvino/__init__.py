"""OpenVINO IR: values become outputs, names come from friendly names."""
