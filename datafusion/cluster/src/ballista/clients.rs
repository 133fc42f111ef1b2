//! [`ClientPool`]: connections to other executors.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballista_core::client::BallistaClient;
use ballista_core::client_pool::{BallistaClientPool, PooledClient};
use ballista_core::error::Result;
use ballista_core::extension::BallistaConfigGrpcEndpoint;
use ballista_core::utils::GrpcClientConfig;

/// Connections to other executors that are kept while they are idle, so that a task that reads a shuffle need not connect anew to each
/// executor.
///
/// An executor process of Ballista has such a pool, unless it is given an execution engine, as
/// [`DeviceEngine`](super::DeviceEngine) is; and the pool's type is private. So `DeviceEngine::new` uses this one.
#[derive(Clone)]
pub struct ClientPool {
    idle: Arc<Mutex<Idle>>,
    ttl: Duration,
}

type Key = (String, u16, GrpcClientConfig);
/// The connections to each executor, the one that was used last at the end.
type Idle = HashMap<Key, Vec<(BallistaClient, Instant)>>;

impl ClientPool {
    /// Makes a pool that closes connections that have not been used for as long as `ttl`, when others are next asked for or returned.
    pub fn new(ttl: Duration) -> Self {
        Self {
            idle: Arc::default(),
            ttl,
        }
    }

    /// Returns the number of connections that are kept.
    pub fn idle(&self) -> usize {
        self.with(|idle| idle.values().map(Vec::len).sum())
    }

    /// Nothing that is done with the lock held panics half way.
    fn with<T>(&self, work: impl FnOnce(&mut Idle) -> T) -> T {
        work(&mut self.idle.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes out what is too old; it is closed once the lock is free.
    fn evict(&self) {
        let old: Vec<_> = self.with(|idle| {
            let old = idle.values_mut().flat_map(|clients| {
                let fresh = clients.iter().position(|(_, at)| at.elapsed() < self.ttl);
                clients.drain(..fresh.unwrap_or(clients.len()))
            });
            let old = old.collect();
            idle.retain(|_, clients| !clients.is_empty());
            old
        });
        drop(old);
    }
}

#[async_trait::async_trait]
impl BallistaClientPool for ClientPool {
    async fn acquire(
        &self,
        host: &str,
        port: u16,
        config: &GrpcClientConfig,
        customize_endpoint: Option<Arc<BallistaConfigGrpcEndpoint>>,
    ) -> Result<PooledClient> {
        self.evict();
        let key: Key = (host.to_owned(), port, config.clone());
        let client = match self.with(|idle| idle.get_mut(&key)?.pop()) {
            Some((client, _)) => client,
            None => {
                BallistaClient::try_new(
                    host,
                    port,
                    config.max_message_size,
                    config.use_tls,
                    customize_endpoint,
                    config.io_retries_times,
                    config.io_retry_wait_time_ms,
                    config.initial_connection_window_size,
                    config.initial_stream_window_size,
                )
                .await?
            }
        };
        let pool = self.clone();
        let put_back = move |client| {
            pool.evict();
            pool.with(|idle| idle.entry(key).or_default().push((client, Instant::now())));
        };
        Ok(PooledClient::new(client, Box::new(put_back)))
    }

    async fn evict_idle(&self) {
        self.evict();
    }
}

impl fmt::Debug for ClientPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientPool")
            .field("idle", &self.idle())
            .field("ttl", &self.ttl)
            .finish()
    }
}
