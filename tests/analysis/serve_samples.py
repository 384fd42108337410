"""What vLLM 0.32 wrote in a small run (cut short), and a program that passes for an interpreter with vLLM."""

from __future__ import annotations

METRICS = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 14706.0
python_gc_objects_collected_total{generation="1"} 2369.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 2.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.9523809523809523
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="smollm2"} 3.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="smollm2"} 1.7959943886753788e+09
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 4.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",num_cpu_blocks="None",num_gpu_blocks="22",num_gpu_blocks_override="None"} 1.0
"""  # noqa: E501

CLIENT = {
    "date": "20261129-231736", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "smollm2",
    "num_prompts": 2, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": None, "duration": 15.244053139998869,
    "completed": 2, "failed": 0, "total_input_tokens": 1000, "total_output_tokens": 32,
    "request_throughput": 0.13119870293, "output_throughput": 2.0991792475477014,
    "mean_ttft_ms": 8206.364426001528, "median_ttft_ms": 8206.364426001528, "std_ttft_ms": 4830.9,
    "p50_ttft_ms": 8206.364426001528, "p90_ttft_ms": 12071.237769198342, "p99_ttft_ms": 12940.834271417625,
    "mean_tpot_ms": 270.51232613327255, "p50_tpot_ms": 270.51232613327255, "p90_tpot_ms": 369.30441610665486,
    "p99_tpot_ms": 391.5326363506659, "mean_itl_ms": 270.51232613327255, "p50_itl_ms": 197.2114709969901,
    "p90_itl_ms": 553.3395463040512, "p99_itl_ms": 1338.8163984707355, "mean_e2el_ms": 12264.049318000616,
    "p50_e2el_ms": 12264.049318000616, "p90_e2el_ms": 14647.041311596695, "p99_e2el_ms": 15183.214510155813,
}  # fmt: skip

LOG = """\
(APIServer pid=1) WARNING 11-29 23:12:43 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many`
(EngineCore pid=2) ERROR 11-29 23:13:12 [core.py:1510]     raise ValueError(
(EngineCore pid=2) ERROR 11-29 23:13:12 [core.py:1510] ValueError: To serve at least one request, 0.01 GiB are needed
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

# Serves METRICS, or refuses 4 MiB as vLLM does; is the client; says its versions. The server has a child, as vLLM has,
# that would outlive it, and the plugin's is twice as fast.
PROGRAM = """\
#!{python}
import http.server, json, os, subprocess, sys, time

arguments = sys.argv[1:]
after = lambda name: arguments[arguments.index(name) + 1]
here = os.path.dirname(os.path.abspath(__file__))
if "vllm.entrypoints.openai.api_server" in arguments:
    if after("--kv-cache-memory-bytes") == str(4 << 20):
        sys.exit({log!r})
    child = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(here, "children"), "a") as file:
        print(child.pid, file=file)
    with open(os.path.join(here, "speed"), "w") as file:
        print(2 if "--worker-cls" in arguments else 1, file=file)
    pages = {{"/health": "", "/version": '{{"version": "0.32.0"}}', "/metrics": {metrics!r}, "/v1/completions": "{{}}"}}
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())
        do_POST = do_GET
        def log_message(self, *_):
            pass
    http.server.HTTPServer((after("--host"), int(after("--port"))), Handler).serve_forever()
elif "--result-dir" in arguments:
    result = {client!r}
    result["output_throughput"] *= int(open(os.path.join(here, "speed")).read())
    time.sleep(0.3)
    with open(os.path.join(after("--result-dir"), after("--result-filename")), "w") as file:
        json.dump(result, file)
else:
    kept = {{"torch": "2.13.0+cpu", "transformers": "5.19.0", "device": ""}}
    print(json.dumps({{"vllm": True, "pandas": False, "kept": kept}}))
"""
