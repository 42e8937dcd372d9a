"""ONNX models on ONNX Runtime: values become outputs, names come from scopes."""
