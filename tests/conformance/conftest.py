"""Registers the markers that Transformers' mixins put on their tests (the project's pytest settings are strict)."""

MARKERS = """
    accelerate_tests executorch_export_test flash_attn_test flash_attn_3_test flash_attn_4_test generate is_agent_test
    is_pipeline_test is_staging_test is_training_test onnx_export_test openvino_export_test order timeout
    torch_compile_test torch_export_test
"""


def pytest_configure(config):
    for name in MARKERS.split():
        config.addinivalue_line("markers", f"{name}: set by the test mixins of Transformers")
