"""What is used of Ray and is not promised to stay: an upgrade fails here first."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_ray_has_what_the_bridge_and_the_replicas_use():
    from ray import serve
    from ray._private.state import GlobalState
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.scripts import scripts
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.controller import ServeController
    from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

    assert {"max_replicas_per_node", "user_config", "graceful_shutdown_timeout_s"} <= parameters(serve.deployment)
    assert {"target", "name", "route_prefix", "external_scaler_enabled"} <= parameters(serve.RunTarget)
    assert {"wait_for_ingress_deployment_creation", "wait_for_applications_running"} <= parameters(serve.run_many)
    assert "method_name" in parameters(DeploymentHandle.broadcast)
    assert {"timeout_s", "return_exceptions"} <= parameters(DeploymentBroadcastResponse.results_async)
    assert {"name", "app_name"} <= parameters(DeploymentID)
    assert "raise_if_no_controller_running" in parameters(serve.context._get_global_client)
    actor = ServeController.__ray_actor_class__ if hasattr(ServeController, "__ray_actor_class__") else ServeController
    assert {"deployment_id", "target_num_replicas"} <= parameters(actor.update_deployment_replicas)
    assert hasattr(GlobalState, "get_draining_nodes")
    assert DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    assert scripts.ray_constants.ENABLE_RAY_CLUSTER in (True, False)
    assert {"--node-ip-address", "--node-name", "--temp-dir", "--block", "--dashboard-agent-listen-port"} <= {
        name for option in scripts.start.params for name in option.opts
    }


def test_ray_has_what_the_router_and_who_joins_use():
    from ray import serve
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
    from ray._raylet import InnerGcsClient
    from ray.exceptions import AuthenticationError, RpcError
    from ray.scripts import scripts
    from ray.serve._private import constants
    from ray.serve._private.router import AsyncioRouter
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import RequestRouter

    assert {"candidate_replicas", "pending_request"} <= parameters(RequestRouter.choose_replicas)
    assert {"args", "kwargs"} <= parameters(DeploymentHandle.choose_replica)
    # A choice that holds no slot: what Serve's own ingress asks for.
    assert 'pop("_reserve", True)' in inspect.getsource(AsyncioRouter.choose_replica)
    assert {"version", "_internal"} <= parameters(serve.Deployment.options)
    assert "request_router_config" in parameters(serve.deployment)
    assert (CLUSTER_METADATA_KEY, KV_NAMESPACE_CLUSTER) == (b"CLUSTER_METADATA", b"cluster")
    assert hasattr(constants, "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS")
    assert hasattr(InnerGcsClient, "get_all_node_info")  # what GcsClient hands everything on to
    assert hasattr(InnerGcsClient, "internal_kv_get")
    assert issubclass(RpcError, Exception)
    assert not issubclass(AuthenticationError, RpcError)
    assert "--labels" in {name for option in scripts.start.params for name in option.opts}
